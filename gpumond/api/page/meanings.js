// What each share of a device's memory is, in one sentence.

export const MEANINGS = {
  live: "Memory that the program has allocated and uses.",
  cached: "Free memory that an allocator of the program keeps; a flush returns it to the device.",
  stranded: "Free memory that an allocator keeps and cannot return, because of fragmentation or private pools.",
  overhead: "Memory of the process that no allocator reports, such as the CUDA context and libraries.",
  opaque: "All memory of a process without an agent: its parts are unknown.",
  unclaimed: "Memory in use that belongs to no visible process.",
  free: "Memory that no process uses.",
  reserved: "Memory that the driver or the firmware keeps for itself.",
  overcount: "The amount by which the reports of agents exceed the driver’s count.",
  asleep: "Memory that an allocator counts while its pages are released (sleep mode); it is not part of used memory.",
};
