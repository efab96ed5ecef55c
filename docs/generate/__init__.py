"""Pages that are made from the code; ``python -m docs.generate --write`` renews them."""
