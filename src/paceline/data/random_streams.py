"""The streams of randomness in a run, so that no two uses ever share their draws."""

ORDER = 1
CROP_Y = 2
CROP_X = 3
FLIP = 4
CUTOUT_Y = 5
CUTOUT_X = 6
SAMPLE = 7
FORWARD = 8
BETWEEN_STEPS = 9
EVALUATION = 11
SAMPLER = 12
COLLATE = 13
COLLATE_EVALUATION = 14
LATER_STEP = 16
UPDATE = 17
IN_LOOP = 18
