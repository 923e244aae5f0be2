/** What the metrics mean that are worth a look first; docs/reference/metrics.md has all of them. */

const MEANINGS: Record<string, string> = {
  "rollout/raw_reward": "Mean reward of the batch, before reward shaping.",
  "rollout/truncated_ratio": "Share of responses that reached the length limit.",
  "rollout/response_len": "Trained tokens of a sample.",
  "rollout/zero_std/frac": "Share of groups in which every sample has the same reward. They teach GRPO nothing.",
  "rollout/entropy": "Mean entropy of the trained tokens.",
  "rollout/repetition_frac": "Share of responses that repeat themselves.",
  "rollout/staleness": "Policy versions between a sample's oldest token and its training.",
  "train/grad_norm": "Gradient norm before clipping.",
  "train/ppo_kl": "Old minus current log-prob, mean over trained tokens: how far the policy moved in the step.",
  "train/pg_clipfrac": "Share of trained tokens whose ratio was clipped.",
  "train/entropy_loss": "Entropy of the policy at the trained tokens.",
  "train/skipped_steps": "Optimizer steps that were skipped because a loss or gradient was not finite.",
  "train/train_rollout_logprob_abs_diff": "Mean absolute difference between the trainer's and the engine's log-probs.",
  "perf/rollout_time": "Seconds of waiting for the groups of the step.",
  "perf/train_time": "Seconds of computing log-probs and training.",
  "perf/step_time": "Seconds from the end of the last training step to the end of this one.",
  "perf/wait_time_ratio": "Share of the step in which the trainer waited for rollouts and engines.",
};

/** Null: look it up in the reference. `name`: of a chart. */
export function meaningOf(name: string): string | null {
  return MEANINGS[name] ?? null;
}
