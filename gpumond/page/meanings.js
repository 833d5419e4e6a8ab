// What each share of a device's memory is, in one sentence.

export const MEANINGS = {
  live: "Memory that the program has allocated and uses.",
  cached: "Free memory that an allocator of the program keeps; a flush returns it to the device.",
  stranded: "Free memory that an allocator keeps and cannot return, because of fragmentation or private pools.",
  overhead:
    "Memory of the process that no known allocator reports: the CUDA context, libraries, NCCL, CUDA graphs, memory imported from other processes, and caches of libraries without an adapter.",
  opaque: "Memory whose parts are unknown: all of a process without an agent, or a pool that does not count live bytes.",
  unattributed:
    "Memory in use that the driver counts for no process: of an ended process, or managed memory (cudaMallocManaged) of a program without an agent.",
  free: "Memory that no process uses.",
  reserved: "Memory that the driver or the firmware keeps for itself.",
  overcount:
    "The amount by which the parts exceed the driver’s count: for a moment, because agents and driver are read at different times; for longer, because processes share memory (CUDA IPC, VMM) that the driver counts for each of them.",
  unmapped:
    "Memory that an allocator counts while its pages are released, because the program is in sleep mode or suspended; it is not part of used memory.",
};
