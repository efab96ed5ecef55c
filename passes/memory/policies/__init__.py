"""Named recompute policies: each file is one; ``recompute=`` takes its name, and ``POLICY``
decides.

In units of s*b*h bytes of a GPT block in 16 bit (Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models"), with masks stored / regenerated:

===============  ==========================================================  ==================
policy           saved                                                       bytes
===============  ==========================================================  ==================
``"none"``       all that backward uses                                      34+5as/h, 32+4as/h
``"attention"``  the same without the attention core                         34, 32
``"selective"``  results of linears, reductions, attention; stored masks     22, 20
``"full"``       the inputs of the region                                    2
===============  ==========================================================  ==================

Row statistics (mean and rstd of a norm) belong to their norm: they are saved if its result is,
otherwise recomputed with it.
"""
