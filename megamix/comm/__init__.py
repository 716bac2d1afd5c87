"""Communication between ranks. It imports `base`. Begin with `topology`.

starter      the place of a process among those that srun or mpirun has started
topology     the place of this process among the ranks, and its device
start_ranks  ranks made of the processes that torchrun, srun or mpirun start
collectives  the collectives of a step, fixed per backend; JSON of all ranks
host         messages on the host beside a step: host tensors, the last collectives of each rank
timeline     when each transfer of a step was launched, had arrived, was needed and was waited for
"""
