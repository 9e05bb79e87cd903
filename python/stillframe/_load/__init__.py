"""Reading back: archives read ahead, whole objects, and objects that are there already."""
