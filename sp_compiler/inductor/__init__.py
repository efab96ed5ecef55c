"""Inductor runs what lies between the collectives of a region: each such run of statements once.

1. :mod:`.split` cuts the generated functions, at every statement that talks to other ranks or
   checks numbers, into functions of their own with the decorator ``@inductor``: the text stays what
   runs.
2. :mod:`.fused` is that decorator. While a program is compiled, its functions are called once with
   fake tensors, which is when each becomes a graph. Kernels are made when the program first runs:
   by the runtime, on all ranks or on none, or by a function's own call where ranks are simulated.
3. :mod:`.lowering` is the only module that touches Inductor: from a function to a graph of ATen
   operators, and from that to kernels.

No collective, group or rank is in such a graph, so ranks compile alike, share what one of them has
put in Inductor's cache on disk, and never wait for each other in here.
"""
