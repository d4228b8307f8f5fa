"""Prints when each process of this user on this node began, in seconds since the epoch, and its command line."""

import glob
import json
import os
import time

tick = os.sysconf("SC_CLK_TCK")
with open("/proc/uptime") as file:
    boot = time.time() - float(file.read().split()[0])
found = []
for path in glob.glob("/proc/[0-9]*"):
    try:
        if os.stat(path).st_uid == os.getuid():
            with open(path + "/stat") as stat, open(path + "/cmdline") as command:
                began = int(stat.read().rpartition(")")[2].split()[19])
                found.append([boot + began / tick, command.read().replace("\0", " ")])
    except OSError:
        pass  # It has ended meanwhile.
print(json.dumps(found))
