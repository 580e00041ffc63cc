// SPDX-License-Identifier: GPL-2.0
/*
 * A stand-in for the boards of a GPU machine: PCI functions with NVIDIA's ids, seen before any driver is there.
 *
 * Each GPU sits on a PCI bus of its own in a domain of its own, so that it never meets the machine's real devices. It
 * has a configuration space and nothing behind it. Written commands (debugfs, standin_board/fault) make it ill:
 *
 *   lost N      GPU N answers all ones from now on; a reset of the machine cures it
 *   gone N      GPU N vanishes from the bus; a reset of the machine cures it
 *   cold N      GPU N's start-up will fail until power is lost
 *   dead N      GPU N will not even answer after a reset, until power is lost
 *   hang        a task of this module, not of the driver, blocks for ever
 *   lockup S    a processor spins in the kernel for S seconds
 *   back        all GPUs answer again, and the blocked task goes on; what only a loss of power cures stays
 *   mend        back, and what needs a loss of power is cured too
 *
 * What a reset keeps and a loss of power clears is real here too: it lies in a page of memory that the kernel is told
 * to leave alone (memmap=), and a new QEMU process begins with empty memory.
 */
#define pr_fmt(fmt) "standin_board: " fmt
#include <linux/debugfs.h>
#include <linux/delay.h>
#include <linux/io.h>
#include <linux/kthread.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/semaphore.h>

#define DOMAIN 0x0001
#define GPU_BUS 0x10
#define SWITCH_BUS 0xc0
#define MAX_BOARDS 24
#define EXPRESS 0x40 /* where the PCI Express capability lies */
#define STATUS 0x80 /* a register of our own: what the driver's start-up finds */
#define MAGIC 0x53474e41u

static unsigned int gpus = 1;
static unsigned int switches;
static ushort device[MAX_BOARDS] = { 0x2330 }; /* H100 SXM5, as in the PCI ID list */
static unsigned int devices = 1;
static unsigned int switch_device = 0x22a3; /* NVSwitch of Hopper machines */
static unsigned long latch = 0x30000000;
module_param(gpus, uint, 0444);
module_param(switches, uint, 0444);
module_param_array(device, ushort, &devices, 0444);
MODULE_PARM_DESC(device, "PCI device ids of the GPUs; fewer than GPUs: from the first again");
module_param(switch_device, uint, 0444);
module_param(latch, ulong, 0444);
MODULE_PARM_DESC(latch, "physical address of a page that the kernel leaves alone");

enum { COLD = 1, DEAD = 2 };

/* Lies at the latch: survives a reset, not a loss of power. */
struct kept {
	u32 magic;
	u32 state[MAX_BOARDS];
};

struct board {
	struct pci_sysdata sysdata;
	struct resource bus_numbers;
	struct pci_bus *bus;
	u8 config[256];
	bool lost;
};

static struct board boards[MAX_BOARDS];
static unsigned int count;
static struct kept *kept;
static struct semaphore gate = __SEMAPHORE_INITIALIZER(gate, 0);
static int waiting;
static struct dentry *folder;

static struct board *board_of(struct pci_bus *bus)
{
	return container_of((struct pci_sysdata *)bus->sysdata, struct board, sysdata);
}

static int config_read(struct pci_bus *bus, unsigned int devfn, int where, int size, u32 *value)
{
	struct board *board = board_of(bus);

	*value = ~0u;
	if (devfn || board->lost || where + size > sizeof(board->config))
		return PCIBIOS_SUCCESSFUL;
	*value = 0;
	memcpy(value, board->config + where, size);
	return PCIBIOS_SUCCESSFUL;
}

static int config_write(struct pci_bus *bus, unsigned int devfn, int where, int size, u32 value)
{
	struct board *board = board_of(bus);

	/* Only the command register and the interrupt line keep what is written: there are no BARs to size. */
	if (!devfn && !board->lost && ((where >= 4 && where + size <= 6) || where == PCI_INTERRUPT_LINE))
		memcpy(board->config + where, &value, size);
	return PCIBIOS_SUCCESSFUL;
}

static struct pci_ops config_ops = { .read = config_read, .write = config_write };

static void put(struct board *board, int where, int size, u32 value)
{
	memcpy(board->config + where, &value, size);
}

static void describe(struct board *board, u32 id, u32 class, u32 subsystem)
{
	put(board, PCI_VENDOR_ID, 2, PCI_VENDOR_ID_NVIDIA);
	put(board, PCI_DEVICE_ID, 2, id);
	put(board, PCI_STATUS, 2, PCI_STATUS_CAP_LIST);
	put(board, PCI_REVISION_ID, 4, class << 8 | 0xa1);
	put(board, PCI_SUBSYSTEM_VENDOR_ID, 2, PCI_VENDOR_ID_NVIDIA);
	put(board, PCI_SUBSYSTEM_ID, 2, subsystem);
	put(board, PCI_CAPABILITY_LIST, 1, EXPRESS);
	put(board, EXPRESS, 4, PCI_CAP_ID_EXP | 2 << 16); /* an endpoint, version 2 of the capability */
	put(board, EXPRESS + PCI_EXP_LNKCAP, 4, PCI_EXP_LNKCAP_SLS_32_0GB | PCI_EXP_LNKSTA_NLW_X8 << 1);
	put(board, EXPRESS + PCI_EXP_LNKSTA, 2, PCI_EXP_LNKCAP_SLS_32_0GB | PCI_EXP_LNKSTA_NLW_X8 << 1);
	put(board, EXPRESS + PCI_EXP_LNKCAP2, 4, 0x3e); /* 2.5 to 32 GT/s */
}

static int appear(struct board *board, int number)
{
	LIST_HEAD(windows);

	board->sysdata.domain = DOMAIN;
	board->sysdata.node = NUMA_NO_NODE;
	board->bus_numbers = (struct resource){
		.name = "stand-in board", .start = number, .end = number, .flags = IORESOURCE_BUS,
	};
	pci_add_resource(&windows, &board->bus_numbers);
	board->bus = pci_scan_root_bus(NULL, number, &config_ops, &board->sysdata, &windows);
	if (!board->bus)
		return -ENOMEM;
	pci_bus_add_devices(board->bus);
	return 0;
}

static int wait_for_ever(void *unused)
{
	down(&gate);
	return 0;
}

static void recover(void)
{
	for (; waiting; waiting--)
		up(&gate);
	for (int number = 0; number < count; number++)
		boards[number].lost = false;
}

static ssize_t fault_write(struct file *file, const char __user *data, size_t size, loff_t *offset)
{
	char text[64] = "", word[16] = "";
	unsigned int number = 0;
	struct pci_dev *function;

	if (size >= sizeof(text))
		return -EINVAL;
	if (copy_from_user(text, data, size))
		return -EFAULT;
	if (sscanf(text, "%15s %u", word, &number) < 1)
		return -EINVAL;
	if (!strcmp(word, "back") || !strcmp(word, "mend")) {
		recover();
		if (!strcmp(word, "mend"))
			memset(kept->state, 0, sizeof(kept->state));
		for (number = 0; number < count; number++)
			put(&boards[number], STATUS, 4, kept->state[number]);
		pci_lock_rescan_remove();
		for (number = 0; number < count; number++)
			pci_rescan_bus(boards[number].bus);
		pci_unlock_rescan_remove();
	} else if (!strcmp(word, "hang")) {
		waiting++;
		kthread_run(wait_for_ever, NULL, "standin_hang");
	} else if (!strcmp(word, "lockup")) {
		preempt_disable();
		for (unsigned int spun = 0; spun < number * 100; spun++)
			mdelay(10);
		preempt_enable();
	} else if (number >= count) {
		return -ENODEV;
	} else if (!strcmp(word, "lost")) {
		boards[number].lost = true;
	} else if (!strcmp(word, "gone")) {
		pci_lock_rescan_remove();
		function = pci_get_slot(boards[number].bus, 0);
		boards[number].lost = true;
		if (function) {
			pci_stop_and_remove_bus_device(function);
			pci_dev_put(function);
		}
		pci_unlock_rescan_remove();
	} else if (!strcmp(word, "cold") || !strcmp(word, "dead")) {
		kept->state[number] |= strcmp(word, "cold") ? DEAD : COLD;
		put(&boards[number], STATUS, 4, kept->state[number]);
	} else {
		return -EINVAL;
	}
	return size;
}

static const struct file_operations fault_ops = { .owner = THIS_MODULE, .write = fault_write };

static int __init standin_board_init(void)
{
	if (gpus + switches > MAX_BOARDS)
		return -EINVAL;
	kept = memremap(latch, PAGE_SIZE, MEMREMAP_WB);
	if (!kept)
		return -ENOMEM;
	if (kept->magic != MAGIC) {
		pr_info("power was lost\n");
		*kept = (struct kept){ .magic = MAGIC };
	}
	for (unsigned int number = 0; number < gpus + switches; number++) {
		struct board *board = &boards[number];
		bool gpu = number < gpus;
		int bus = gpu ? GPU_BUS + number : SWITCH_BUS + number - gpus;

		describe(board, gpu ? device[number % devices] : switch_device, gpu ? 0x030200 : 0x068000, gpu ? 0x16c1 : 0x1796);
		put(board, STATUS, 4, kept->state[number]);
		board->lost = kept->state[number] & DEAD;
		count++;
		if (appear(board, bus))
			pr_err("no bus for board %u\n", number);
	}
	folder = debugfs_create_dir("standin_board", NULL);
	debugfs_create_file("fault", 0200, folder, NULL, &fault_ops);
	return 0;
}

/* No way out: a board is not taken out of a running machine. */
module_init(standin_board_init);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Stand-in for NVIDIA boards on the PCI bus (gpunodes lab)");
