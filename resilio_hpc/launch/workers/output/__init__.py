"""What ranks print and leave: their streams on the console, logs, error files, ends for want of memory."""
