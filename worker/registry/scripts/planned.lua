-- Replace a job's plan by its shards. ARGV job id, token, grace ms, then the indices of each shard, comma separated.
local job_id, token, grace = ARGV[1], ARGV[2], tonumber(ARGV[3])
local held = redis.call('HMGET', PLAN, 'tok', 'st')
-- A client that lost the reply sends the same call again.
if not held[1] and redis.call('HGET', JOB, 'plan_tok') == token then return 1 end
if held[1] ~= token or held[2] ~= 'running' then return 0 end
local now = now_ms()
local job = redis.call('HMGET', JOB, 'cancel', 'deadline', 'pri')
local look = next_look(now, grace, job[2])
if job[1] ~= '0' then look = now end
for i = 4, #ARGV do
  local _, commas = string.gsub(ARGV[i], ',', ',')
  local shard = {idx = ARGV[i], n = commas + 1, att = 0, first = now, lane = job[3]}
  queue_shard(job_id, i - 4, shard, now, look)
end
redis.call('HSET', JOB, 'st', 'running', 'started', now, 'ns', #ARGV - 3, 'plan_tok', token)
redis.call('UNLINK', PLAN)
redis.call('ZREM', OPEN, job_id .. '/plan')
return 1
