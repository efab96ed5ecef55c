"""The optimisation passes, imported as ``sp_compiler.passes`` and under no other name."""

if __name__ != "sp_compiler.passes":
    raise ImportError(
        f"imported as {__name__!r}; import it as 'sp_compiler.passes', else every pass exists twice"
    )
