-- Write records of a unit, each once, with their counters; finish unit and job with their last one. The line of a prompt
-- that has its answer goes; what failed can be submitted again, see close.
-- ARGV job id, unit, token, records of it that its holder knows of, then eight a record: index, outcome (ok|error|cancelled|expired|lost), JSON,
-- prompt tokens, cached tokens, output tokens, how many of these came from a resume state, and how many are thinking.
local job_id, unit, token = ARGV[1], ARGV[2], ARGV[3]
local held = held_under(token, UNIT, 'n', 'model')
if not held then return {'fenced', ''} end
local job = redis.call('HMGET', JOB, 'st', 'cancel', 'deadline', 'n', 'tenant', 'cb')
if not is_open(job[1]) then return {'fenced', ''} end
check_outbox(job[6])

local now = now_ms()
if is_rewound(job_id .. '/' .. unit, ARGV[4], now) then return {'rewound', ''} end
-- By code: what failed. A quote inside a text is escaped, so no text of a record looks like this.
local codes = {}
local added, sums = 0, {ok = 0, err = 0, exp = 0, can = 0, tokp = 0, tokc = 0, toko = 0, tokr = 0, tokt = 0, resb = 0}
local has_resume_states = redis.call('EXISTS', RESUME) == 1
for i = 5, #ARGV, 8 do
  if redis.call('HSETNX', RES, ARGV[i], ARGV[i + 2]) == 1 then
    redis.call('RPUSH', ORD, ARGV[i])
    added = added + 1
    if has_resume_states then redis.call('HDEL', RESUME, ARGV[i]) end
    local outcome = ARGV[i + 1]
    if outcome == 'ok' then
      sums.ok = sums.ok + 1
      redis.call('HDEL', IN, ARGV[i])
    else
      sums.err = sums.err + 1
      local code = string.match(ARGV[i + 2], '"code":"([%w_]+)"')
      if code then codes['e:' .. code] = (codes['e:' .. code] or 0) + 1 end
    end
    if outcome == 'expired' then sums.exp = sums.exp + 1 end
    if outcome == 'cancelled' then sums.can = sums.can + 1 end
    sums.resb = sums.resb + #ARGV[i + 2]
    sums.tokp = sums.tokp + ARGV[i + 3]
    sums.tokc = sums.tokc + ARGV[i + 4]
    sums.toko = sums.toko + ARGV[i + 5]
    sums.tokr = sums.tokr + ARGV[i + 6]
    sums.tokt = sums.tokt + ARGV[i + 7]
  end
end
if added > 0 then
  for field, sum in pairs(sums) do
    if sum > 0 then redis.call('HINCRBY', JOB, field, sum) end
  end
  for field, count in pairs(codes) do redis.call('HINCRBY', JOB, field, count) end
  local model = held[4] or redis.call('HGET', JOB, 'model') or ''
  count_usage(ADM, job[5], model, {n = added, i = sums.tokp, c = sums.tokc, o = sums.toko}, now)
  give_back(ADM, added, 0, 0)
  give_back(ADM .. ':t:' .. job[5], added, 0, 0)
  redis.call('HINCRBY', ADM .. ':t:' .. job[5], 'result_bytes', sums.resb)
  -- Prompts a second over ten seconds to a minute: what a refused producer's waiting time is guessed from. A window
  -- that was open for longer has idle time in it and begins again.
  local total = redis.call('HINCRBY', ADM, 'total', added)
  local from = redis.call('HMGET', ADM, 'rate_at', 'rate_total')
  if not from[1] or now - from[1] > 60000 then
    redis.call('HSET', ADM, 'rate_at', now, 'rate_total', total)
  elseif now - from[1] >= 10000 then
    local rate = string.format('%.3f', (total - from[2]) * 1000 / (now - from[1]))
    redis.call('HSET', ADM, 'rate', rate, 'rate_at', now, 'rate_total', total)
  end
end

local is_done = redis.call('HINCRBY', UNIT, 'done', added) >= tonumber(held[3])
if is_done then
  redis.call('UNLINK', UNIT)
  redis.call('ZREM', OPEN, job_id .. '/' .. unit)
  if unit ~= 'plan' then redis.call('HINCRBY', JOB, 'sd', 1) end
  count_open(held[4] or nil, -1)
end
if redis.call('HLEN', RES) >= tonumber(job[4]) then
  finish(job_id, now)
  return {'job_done', ''}
end
if is_done then return {'unit_done', ''} end
return {'open', verdict(job[2], job[3], now)}
