"""`shoal up`: starts, supervises and stops the processes of an online system that one file describes."""
