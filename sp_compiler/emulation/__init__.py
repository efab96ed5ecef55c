"""One rank of a group whose other ranks are only calculated, and whose links take time."""
