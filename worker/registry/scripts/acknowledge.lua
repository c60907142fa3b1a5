-- Write something that a full Redis takes too: what waits for the disk or a replica waits for a write of its connection.
-- KEYS adm. ARGV redis.ack.
redis.call('HSET', KEYS[1], 'ack', ARGV[1])
return 1
