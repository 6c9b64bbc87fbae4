"""The pure core: no clock, disk, network, chance, logging.

Time reaches it inside events; what it wants done leaves it as decisions. The same events give the
same decisions, byte for byte, which is what makes a run replayable.
"""
