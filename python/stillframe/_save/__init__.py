"""A save, from the call to its report; and its like: loads, removes, the gate."""
