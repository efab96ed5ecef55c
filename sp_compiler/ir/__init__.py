"""Data passed from pass to pass: captured graph, program, regions, snapshots, text of graphs."""
