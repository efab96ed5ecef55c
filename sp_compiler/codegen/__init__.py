"""From the graphs of a region to the Python text that runs, in this order.

1. :mod:`.token_rows` leaves out views that say nothing; :mod:`.idioms` finds several nodes that one
   call of torch stands for.
2. :mod:`.names` proposes names for each value, after the user's source (:mod:`.user_source`).
3. :mod:`.nesting` decides which values stand inside the expression that uses them, and need none.
4. :mod:`.lifetimes` gives the others names and says where they die.
5. :mod:`.expressions` prints a node as an expression, spelled as in :mod:`.spelling`.
6. :mod:`.statements` makes assignments of them, in sections, with comments of :mod:`.descriptions`.
7. :mod:`.module_text` makes a class of the functions and a module of the classes;
   :mod:`.loading` executes it, and :mod:`.backends` decides what runs.

Code generation does not change the computation: kernels, the order of starts and waits of
collectives, and the peak of memory are those of the graphs.
"""
