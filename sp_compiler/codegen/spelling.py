"""Spelling of operators as a person writes them: a symbol, a method of the first argument, or a
torch function.

It uses only builtin functions, which cost half as much as calling an ``OpOverload``; functions
written in Python, such as most of :mod:`torch.nn.functional`, cost more.
"""

from __future__ import annotations

import torch

aten = torch.ops.aten

INFIX = {
    aten.add.Tensor: "+",
    aten.add.Scalar: "+",
    aten.sub.Tensor: "-",
    aten.sub.Scalar: "-",
    aten.mul.Tensor: "*",
    aten.mul.Scalar: "*",
    aten.div.Tensor: "/",
    aten.div.Scalar: "/",
    aten.ne.Tensor: "!=",
    aten.ne.Scalar: "!=",
    aten.eq.Tensor: "==",
    aten.eq.Scalar: "==",
    aten.lt.Tensor: "<",
    aten.lt.Scalar: "<",
    aten.le.Tensor: "<=",
    aten.le.Scalar: "<=",
    aten.gt.Tensor: ">",
    aten.gt.Scalar: ">",
    aten.ge.Tensor: ">=",
    aten.ge.Scalar: ">=",
}
# Operators that bind more tightly need no parentheses inside looser ones.
BINDS = {"+": 1, "-": 1, "*": 2, "/": 2, "==": 0, "<": 0, "<=": 0, ">": 0, ">=": 0, "!=": 0}
METHODS = {
    aten.t.default: "t",
    aten.expand.default: "expand",
    aten.unsqueeze.default: "unsqueeze",
    aten.squeeze.dim: "squeeze",
    aten.select.int: "select",
    aten.split.Tensor: "split",
    aten.split_with_sizes.default: "split",
    aten.unbind.int: "unbind",
    aten.neg.default: "neg",
    aten.new_zeros.default: "new_zeros",
    aten.exp.default: "exp",
    aten.masked_fill.Scalar: "masked_fill",
    aten.masked_fill.Tensor: "masked_fill",
}
FUNCTIONS = {
    **{
        overload: f"torch.{overload.__name__.partition('.')[0]}"
        for overload in (
            aten._log_softmax_backward_data.default,
            aten._softmax_backward_data.default,
            aten.addmm.default,
            aten.arange.default,
            aten.baddbmm.default,
            aten.bmm.default,
            aten.cat.default,
            aten.constant_pad_nd.default,
            aten.cos.default,
            aten.embedding.default,
            aten.full.default,
            aten.mean.dim,
            aten.mm.default,
            aten.ones.default,
            aten.pow.Tensor_Scalar,
            aten.relu.default,
            aten.rsqrt.default,
            aten.scalar_tensor.default,
            aten.sigmoid.default,
            aten.sin.default,
            aten.stack.default,
            aten.sum.default,
            aten.sum.dim_IntList,
            aten.tanh.default,
            aten.tril.default,
            aten.where.ScalarSelf,
        )
    },
    aten.gelu.default: "F.gelu",
    aten.linear.default: "F.linear",
}
