"""Every test of this folder forks its ranks from this process, so no thread pool may start in it."""

import torch

torch.set_num_threads(1)
