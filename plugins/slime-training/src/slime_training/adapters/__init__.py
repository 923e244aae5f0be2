"""Several LoRA adapters (Hu et al. 2021, arXiv 2106.09685) over the weights of one model, in trainers and engines."""
