"""What commands say: recorded outputs of every command that needs no workers, and a catalogue of users' mistakes."""
