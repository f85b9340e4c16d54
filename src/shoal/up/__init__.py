"""One file for a whole online system: which processes it has, how they are started, watched, stopped and placed."""
