"""The sharding rules: one table from ATen operator to the factors of its dimensions."""

from sp_compiler.rules import backward as backward  # registers its rows
