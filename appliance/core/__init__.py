"""What decides: values in, values out. Standard library only; time, randomness and the machine are arguments."""
