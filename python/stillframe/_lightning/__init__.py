"""The checkpoint plugin and the callbacks, for both packages of Lightning."""
