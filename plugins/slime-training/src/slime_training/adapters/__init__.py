"""LoRA adapters of which several are used over one model's weights (Hu et al. 2021, arXiv 2106.09685), by trainers and engines."""
