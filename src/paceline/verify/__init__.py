"""Does a training script compute on N workers what it computes on one? Records of both, compared, and the cause."""
