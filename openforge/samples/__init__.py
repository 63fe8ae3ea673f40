"""The samples stage: filter, merge, credit (see `build`)."""
