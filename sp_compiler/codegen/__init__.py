"""From the graphs of a region to the Python text that runs, in this order.

1. :mod:`.token_rows` leaves out redundant views; :mod:`.idioms` finds groups of nodes that can be
   printed as one call of torch.
2. :mod:`.names` proposes names for each value, after the user's source (:mod:`.user_source`).
3. :mod:`.nesting` decides which values are nested in the expression that uses them, without a name.
4. :mod:`.lifetimes` names the other values and decides where they are deleted.
5. :mod:`.expressions` prints a node as an expression, spelled as in :mod:`.spelling`.
6. :mod:`.statements` turns expressions into assignments, in sections, with comments of
   :mod:`.descriptions`.
7. :mod:`.module_text` makes a class of the functions and a module of the classes;
   :mod:`.loading` executes it, and :mod:`.backends` decides what runs.

Code generation does not change the computation: kernels, the order of starts and waits of
collectives, and the peak of memory are those of the graphs.
"""
