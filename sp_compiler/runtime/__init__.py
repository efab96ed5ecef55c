"""What the generated code calls while it runs."""
