"""Images and videos for models of the Qwen-VL family: the modalities `image` and `video`."""
