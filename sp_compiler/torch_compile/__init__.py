"""The backend of ``torch.compile``."""
