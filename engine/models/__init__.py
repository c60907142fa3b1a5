"""The models themselves, decoders and encoders, and how a checkpoint becomes one."""
