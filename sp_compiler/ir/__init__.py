"""What passes hand to each other: captured graph, program, regions, snapshots, text of graphs."""
