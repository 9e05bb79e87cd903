"""Loading: archives that are read ahead, whole objects, and objects filled in place."""
