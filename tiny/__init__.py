"""flux-tiny from nothing: the scenes it knows, the recipe that trains it, the judge of its pictures, and the demo."""
