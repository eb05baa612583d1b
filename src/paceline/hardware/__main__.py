"""What a node tells a launcher of itself, as one line of JSON: `python -m paceline.hardware`."""

import json

from paceline.hardware.detect import describe_node

if __name__ == "__main__":
    print(json.dumps(describe_node()))
