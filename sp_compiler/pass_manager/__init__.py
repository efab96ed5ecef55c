"""Running passes: reports, stages, results shared by memory settings, user passes, the fallback."""
