"""One thread a test: these tensors are small, and the ranks of a test already take turns."""

import torch

torch.set_num_threads(1)
