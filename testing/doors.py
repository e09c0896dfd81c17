"""A door: a process that listens on a port, and hands every connection to where a test wants it.

It is a process of its own because a replica is known by the process that listens. It says "tries" when it begins to try
for its port, and "open" when it has it.
"""

DOOR = """
import socket, sys, threading, time

def carry(source, sink):
    try:
        while chunk := source.recv(65536):
            sink.sendall(chunk)
    except OSError:
        pass
    for end in (source, sink):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

def connected(target):
    if target.startswith("/"):
        inside = socket.socket(socket.AF_UNIX)
        inside.connect(target)
        return inside
    return socket.create_connection(("127.0.0.1", int(target)))

def serve(client):
    inside = connected(sys.argv[2])
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    threading.Thread(target=carry, args=(client, inside), daemon=True).start()
    carry(inside, client)

print("tries", flush=True)
while True:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", int(sys.argv[1])))
        listener.listen()
        break
    except OSError:
        listener.close()
        time.sleep(0.001)
print("open", flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""
