"""Who owns which matrix, and in which wave it is moved: owners, bounds, waves, slices."""
