"""The embedded rollout engine `local` and the weight transport `direct`."""
