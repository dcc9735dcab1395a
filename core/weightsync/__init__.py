"""Weights on their way from the trainer to generators in other processes.

For the sync stage and for the workers at both ends. The executor carries them, or a transport that the config names:
then they are cut into chunks with a checksum each, which are checked where they arrive and sent again where they are
damaged or lost. What a transport moves, and how an engine takes weights, is left to those plugins.

- `cargo`: what is sent, and its table of contents; `chunks`: how that is cut; `wire`: the messages;
- `sender` and `receiver`: the two ends; `deliver`: the controller, which tells them when.
"""
