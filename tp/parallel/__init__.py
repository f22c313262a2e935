"""Groups, collectives, their gradients, and the arithmetic of who owns what."""

from tp.parallel.communicator import CommunicationStatistics, Communicator
from tp.parallel.group import TensorParallelGroup
from tp.parallel.partition import Part

__all__ = ["CommunicationStatistics", "Communicator", "Part", "TensorParallelGroup"]
