"""What went wrong with DataParallel in backward and in the surroundings of a call."""
