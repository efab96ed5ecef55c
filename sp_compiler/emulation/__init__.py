"""One rank of a group whose other ranks exist in arithmetic alone, and whose links take time."""
