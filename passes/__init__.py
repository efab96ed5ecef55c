"""The optimisation passes, imported only as ``sp_compiler.passes``."""

if __name__ != "sp_compiler.passes":
    raise ImportError(
        f"imported as {__name__!r}; import it as 'sp_compiler.passes', else every pass exists twice"
    )
