"""Compilation with Inductor of the code between the collectives of a region.

1. :mod:`.split` cuts the generated functions at every statement that communicates or checks
   values, and moves the code in between into functions decorated with ``@inductor``.
2. :mod:`.fused` is that decorator. While a program is compiled, its functions are called once with
   fake tensors, which is when each becomes a graph. Kernels are made when the program first runs:
   by the runtime, on all ranks or on none, or by a function's own call where ranks are simulated.
3. :mod:`.lowering` goes from a function to a graph of ATen operators, and from that to kernels. It
   and :mod:`.shortcuts`, which saves Inductor repeated work, are the only modules that
   touch Inductor.
4. :mod:`.inlining` inserts graphs of dropout and the like into those of the functions.

No collective, group or rank is in such a graph, so ranks compile in the same way, share what one of
them has put in Inductor's cache on disk, and never wait for each other here.
"""
