"""Capture: torch.compile in front, AOTAutograd behind; a model's call becomes forward and backward graphs."""
