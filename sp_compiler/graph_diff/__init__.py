"""What differs between two graphs, programs or modules."""
