"""Limits on waits, and the diagnosis of a hang.

watchdog              limits every wait, and asks all ranks for their status when one is exceeded
pending_works         collectives of a backend whose waits do not block, and which of them does not end
rank_status           the status of one rank: its stack, its waits, its last collectives
peer_statuses         exchanges the statuses of all ranks through a store: one rank gathers, the others read
hang_report           compares the statuses and names the ranks that caused the hang
desync_check          compares collectives across ranks before they are issued
timeout_store_client  a store client whose requests time out
process_probe         observes the process of a rank from outside: alive or stopped, and its stack
process_identity      identity of the host and its processes
"""
