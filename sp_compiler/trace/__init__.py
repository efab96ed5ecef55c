"""From a module to a graph: the export, and the joint graph of forward and backward."""
